// Ties the sliders to the signals of the chart; the mathematics is in its specification.
(() => {
  const controls = document.getElementById("explorer-controls");
  const box = document.getElementById("explorer-chart");
  const field = name => controls.elements.namedItem(name);
  const settings = () => ({
    xi: Number(field("xi").value),
    eta: Number((10 ** Number(field("eta").value)).toPrecision(3)),
    tokens: Number(field("tokens").value),
    process: field("process").value,
    neighbors: Number(field("neighbors").value),
  });
  const say = (id, text) => { document.getElementById(id).textContent = text; };

  async function update() {
    const now = settings(), view = locater.views["explorer-chart"];
    for (const name of ["xi", "eta", "tokens", "neighbors"]) {
      say(`explorer-${name}`, String(now[name]));
      field(name).setAttribute("aria-valuetext", String(now[name]));
    }
    field("neighbors").disabled = now.process !== "autoregressive";
    if (!view) return;
    for (const [name, value] of Object.entries(now)) view.signal(name, value);
    await view.runAsync();
    const [regime] = view.data("regime"), rows = view.data("tokens_rho");
    say("explorer-regime", regime.name);
    say("explorer-words", `: ${regime.count} of ${now.tokens} tokens on (${regime.first} to ` +
      `${regime.last}), largest ρ ${regime.peak.toFixed(4)}, r = ξη = ` +
      `${Number((now.xi * now.eta).toPrecision(4))}.`);
    const shown = [0, 1, 2, 3, 4].map(k => Math.round((now.tokens - 1) * k / 4));
    const table = document.getElementById("explorer-values");
    table.replaceChildren(...[...new Set(shown)].map(place => {
      const row = document.createElement("tr"), cells = rows[place];
      for (const text of [`${cells.i}`, cells.theta.toFixed(3), cells.printed.toFixed(4),
        cells.corrected.toFixed(4), cells.rho.toFixed(4)]) {
        const cell = document.createElement("td");
        cell.className = "number";
        cell.textContent = text;
        row.append(cell);
      }
      return row;
    }));
    controls.dataset.shown = JSON.stringify(now);
  }

  controls.addEventListener("input", update);
  controls.addEventListener("submit", event => event.preventDefault());
  box.addEventListener("drawn", update);
})();
