// Maps of heads, their detail and their ranking. Names from checkpoints enter as text only.
(() => {
  const data = locater.data("audit-data"), {audits} = data, several = audits.length > 1;
  const controls = document.getElementById("audit-controls");
  const chosen = name => controls.elements.namedItem(name)?.value ?? "values";
  const byId = id => document.getElementById(id);
  const title = column => data.numbers[column] ?? data.words[column] ?? column;
  let current = null;

  function make(tag, text = "", attributes = {}) {
    const node = document.createElement(tag);
    node.textContent = text;
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  }

  for (const audit of audits) {
    const raw = Uint8Array.from(atob(audit.lists), letter => letter.charCodeAt(0));
    audit.shares = new Int16Array(raw.buffer);
    let place = 0;
    audit.starts = audit.sizes.map(([plane, singular, rho]) => {
      const start = place;
      place += 2 * plane + singular + rho;
      return start;
    });
    audit.find = new Map(audit.row.map((row, k) => [`${audit.modules[row]} ${audit.head[k]}`, k]));
  }
  // the address of a head, and the head of an address
  const addressOf = (audit, k) => locater.anchor(audit.layers[audit.row[k]], audit.head[k]);
  function addressed() {
    const wanted = decodeURIComponent(location.hash.slice(1));
    for (const audit of audits) {
      const k = audit.row.findIndex((_, place) => addressOf(audit, place) === wanted);
      if (k >= 0) return keyOf(audit, k);
    }
    return null;
  }
  const keyOf = (audit, k) => `${audit.modules[audit.row[k]]} ${audit.head[k]}`;

  function value(audit, k, column) {
    const words = audit.words[column];
    return words ? words.values[words.rows[k]] : audit.columns[column][k];
  }

  // what a cell shows: the value, or how it differs from the first audit's
  function shown(audit, k, column) {
    if (chosen("mode") !== "change" || audit === audits[0]) return value(audit, k, column);
    const before = audits[0].find.get(keyOf(audit, k));
    if (before === undefined) return null;
    const [from, to] = [value(audits[0], before, column), value(audit, k, column)];
    if (data.words[column]) return from === to ? "unchanged" : "changed";
    return from === null || to === null ? null : to - from;
  }

  const number = x => x === null || x === undefined ? "none" : typeof x !== "number" ? String(x)
    : Number.isInteger(x) ? String(x) : String(Number(x.toPrecision(4)));

  // ---- colors
  const viridis = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962",
    "#addc30", "#fde725"];
  const aroundZero = ["#00466e", "#0072b2", "#7fb8d8", "#f2f2f2", "#eaae7f", "#d55e00", "#7d3700"];
  const bytes = color => [1, 3, 5].map(k => parseInt(color.slice(k, k + 2), 16));
  const ramp = stops => share => {
    const place = share * (stops.length - 1), left = Math.min(Math.floor(place), stops.length - 2);
    const [from, to] = [bytes(stops[left]), bytes(stops[left + 1])];
    return "#" + from.map((x, k) => Math.round(x + (to[k] - x) * (place - left))
      .toString(16).padStart(2, "0")).join("");
  };
  const other = {changed: "#D55E00", unchanged: "#999999"};
  function palette(values) {
    const numbers = values.filter(x => typeof x === "number").sort((a, b) => a - b);
    if (!numbers.length) return {color: word => data.colors[word] ?? other[word] ?? "#bbbbbb"};
    const cut = numbers.length > 50 ? 0.02 : 0;  // a few outliers must not take all the colors
    const at = share => numbers[Math.round(share * (numbers.length - 1))];
    let [low, high] = [at(cut), at(1 - cut)];
    const signed = numbers[0] < 0 && numbers[numbers.length - 1] > 0;
    if (signed) { high = Math.max(Math.abs(low), Math.abs(high)); low = -high; }
    const scheme = ramp(signed ? aroundZero : viridis);
    const share = x => high > low ? Math.min(1, Math.max(0, (x - low) / (high - low))) : 0.5;
    const marks = [numbers[0] < low ? "≤ " : "", numbers[numbers.length - 1] > high ? "≥ " : ""];
    return {low, high, marks, scheme, color: x => typeof x === "number" ? scheme(share(x)) : "#bbbbbb"};
  }
  function inkOn(color) {
    const [red, green, blue] = bytes(color);
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#000" : "#fff";
  }

  // ---- maps
  function drawMaps() {
    const column = chosen("column"), change = chosen("mode") === "change";
    const all = audits.map(audit => audit.row.map((_, k) => shown(audit, k, column)));
    const colors = palette(all.slice(change ? 1 : 0).flat());
    audits.forEach((audit, which) => {
      const plain = change && !which;  // what the others are held against has no change to show
      audit.caption.textContent = audit.label + (plain ? " (the first: no change to show)" : "");
      audit.cells.forEach((cell, k) => {
        const x = all[which][k], color = plain ? "#bbbbbb" : colors.color(x);
        cell.style.background = color;
        cell.style.color = inkOn(color);
        cell.textContent = typeof x === "string" && !plain ? x[0].toUpperCase() : "";
        const words = `layer ${audit.layers[audit.row[k]]}, head ${audit.head[k]}: ` +
          `${title(column)} ${change && which ? "change " : ""}${number(x)}`;
        cell.setAttribute("aria-label", words);
        cell.title = words;
      });
    });
    drawScale(colors, all.slice(change ? 1 : 0).flat(), (change ? "change of " : "") + title(column));
  }

  function drawScale(colors, values, name) {
    const box = byId("audit-scale");
    box.replaceChildren(make("span", name + ":"));
    if (colors.scheme) {
      const stops = [0, 0.25, 0.5, 0.75, 1].map(colors.scheme).join(",");
      box.append(make("span", colors.marks[0] + number(colors.low)),
        make("i", "", {style: `background: linear-gradient(90deg, ${stops})`}),
        make("span", colors.marks[1] + number(colors.high)));
      return;
    }
    const counts = new Map();
    for (const word of values) counts.set(word, (counts.get(word) ?? 0) + 1);
    for (const [word, count] of counts) {
      const color = colors.color(word), entry = make("span");
      entry.append(make("b", String(word ?? "none")[0].toUpperCase(),
        {style: `background: ${color}; color: ${inkOn(color)}`}), `${word} (${count})`);
      box.append(entry);
    }
  }

  function buildMap(audit, which) {
    const heads = [...new Set(audit.head)].sort((a, b) => a - b);
    const table = make("table", "", {class: "map", role: "grid",
      "aria-label": `Heads of ${audit.label}, layers by heads`});
    const top = make("tr", "", {role: "row"});
    top.append(make("td", "", {role: "presentation", style: "cursor: auto"}));
    for (const head of heads) {
      top.append(make("th", head % 4 ? "·" : String(head), {scope: "col", role: "columnheader",
        "aria-label": `head ${head}`}));
    }
    const header = document.createElement("thead"), body = document.createElement("tbody");
    header.append(top);
    audit.cells = [];
    const rows = audit.layers.map(label => {
      const row = make("tr", "", {role: "row"});
      row.append(make("th", label, {scope: "row", role: "rowheader"}));
      body.append(row);
      return {row, cells: new Map()};
    });
    audit.row.forEach((place, k) => {
      const cell = make("td", "", {role: "gridcell", tabindex: "-1", "aria-selected": "false"});
      cell.dataset.audit = which;
      cell.dataset.head = k;
      rows[place].cells.set(audit.head[k], cell);
      audit.cells.push(cell);
    });
    for (const {row, cells} of rows) {
      for (const head of heads) row.append(cells.get(head) ?? make("td", "", {role: "presentation"}));
    }
    table.append(header, body);
    if (audit.cells.length) audit.cells[0].tabIndex = 0;
    table.addEventListener("click", event => {
      const cell = event.target.closest("td[data-head]");
      if (cell) pick(keyOf(audit, Number(cell.dataset.head)), cell);
    });
    table.addEventListener("keydown", event => step(event, table, audit));
    const figure = document.createElement("figure"), box = make("div", "", {class: "table"});
    box.append(table);
    audit.caption = make("figcaption", audit.label);
    figure.append(audit.caption, box);
    return figure;
  }

  function step(event, table, audit) {
    const cell = event.target.closest("td[data-head]");
    if (!cell) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      pick(keyOf(audit, Number(cell.dataset.head)), cell);
      return;
    }
    const line = [...cell.parentNode.children], column = line.indexOf(cell);
    const up = cell.parentNode.previousElementSibling, down = cell.parentNode.nextElementSibling;
    const next = {ArrowLeft: () => line[column - 1], ArrowRight: () => line[column + 1],
      ArrowUp: () => up?.children[column], ArrowDown: () => down?.children[column],
      Home: () => line[1], End: () => line[line.length - 1]}[event.key]?.();
    if (!next?.dataset?.head) return;
    event.preventDefault();
    focusOn(table, next);
    next.focus();
  }

  function focusOn(table, cell) {
    table.querySelector('td[tabindex="0"]')?.setAttribute("tabindex", "-1");
    cell.tabIndex = 0;
  }

  // ---- one head
  function lists(audit, k) {
    const [plane, singular, rho] = audit.sizes[k], scales = audit.scales[k];
    const start = audit.starts[k], share = place => audit.shares[start + place] / 32767;
    const take = (from, count, scale) => Array.from({length: count}, (_, j) =>
      Number((share(from + j) * scale).toPrecision(6)));
    return {real: take(0, plane, scales[0]), imaginary: take(plane, plane, scales[0]),
      singular: take(2 * plane, singular, scales[1]), rho: take(2 * plane + singular, rho, scales[2])};
  }

  function fill() {
    if (current === null) return;
    const rows = {eigenvalues: [], singular: [], rho: []};
    for (const audit of audits) {
      const k = audit.find.get(current);
      if (k === undefined) continue;
      const found = lists(audit, k), checkpoint = audit.label;
      found.real.forEach((real, j) => rows.eigenvalues.push(
        {checkpoint, real, imaginary: found.imaginary[j]}));
      found.singular.forEach((x, j) => rows.singular.push({checkpoint, index: j + 1, value: x}));
      found.rho.forEach((rho, j) => rows.rho.push({checkpoint, theta: audit.theta[j], rho}));
    }
    for (const [name, values] of Object.entries(rows)) {
      locater.views[`head-${name}`]?.data(name, values).run();
    }
  }

  // what the reader chose stays in the address, so that it can be sent and survives a reload
  function pick(key, cell) {
    choose(key, cell);
    const holder = audits.find(audit => audit.find.has(key));
    history.replaceState(null, "", "#" + addressOf(holder, holder.find.get(key)));
  }

  function choose(key, cell) {
    current = key;
    for (const audit of audits) {
      for (const old of audit.cells) if (old.ariaSelected === "true") old.ariaSelected = "false";
      const k = audit.find.get(key);
      if (k !== undefined) audit.cells[k].ariaSelected = "true";
    }
    if (cell) focusOn(cell.closest("table"), cell);
    const holder = audits.find(audit => audit.find.has(key)), at = holder.find.get(key);
    const name = make("a", `layer ${holder.layers[holder.row[at]]} head ${holder.head[at]}`,
      {href: "#" + addressOf(holder, at)});
    byId("head-name").replaceChildren(name, ` (${holder.modules[holder.row[at]]})`);
    byId("head-verdicts").replaceChildren(...audits.map(audit => {
      const k = audit.find.get(key), line = make("p");
      if (several) line.append(make("strong", audit.label), ": ");
      line.append(k === undefined ? "has no such head."
        : `${value(audit, k, "verdict")} (regime ${value(audit, k, "regime")}): ` +
          `${value(audit, k, "reason")}.`);
      return line;
    }));
    fillNumbers(key);
    fill();
    document.documentElement.dataset.head = key;
  }

  function fillNumbers(key) {
    const places = audits.map(audit => audit.find.get(key)), last = audits.length - 1;
    const top = make("tr");
    top.append(make("th", "number", {scope: "col"}));
    for (const audit of audits) top.append(make("th", audit.label, {scope: "col", class: "number"}));
    if (several) top.append(make("th", "last − first", {scope: "col", class: "number"}));
    const lines = [...Object.keys(data.numbers), ...data.extra].map(column => {
      const line = make("tr"), found = places.map((k, which) =>
        k === undefined ? null : value(audits[which], k, column));
      line.append(make("th", title(column), {scope: "row"}));
      for (const x of found) line.append(make("td", number(x), {class: "number"}));
      if (several) {
        const both = typeof found[0] === "number" && typeof found[last] === "number";
        line.append(make("td", both ? number(found[last] - found[0]) : "", {class: "number"}));
      }
      return line;
    });
    byId("head-numbers").replaceChildren(top, ...lines);
  }

  // ---- ranking
  function rank() {
    const audit = audits[audits.length - 1], column = chosen("column");
    const shown = ["deviation", "effective_tokens", "r"];
    const listed = audit.row.map((_, k) => k);
    const before = k => several ? audits[0].find.get(keyOf(audit, k)) : undefined;
    const change = k => {
      const [from, to] = [value(audits[0], before(k), column), value(audit, k, column)];
      return typeof to === "number" && typeof from === "number" ? Math.abs(to - from)
        : Number(from !== to);
    };
    const order = several ? listed.filter(k => before(k) !== undefined)
      .map(k => [-change(k), k]) : listed.map(k => [audit.concern[k], k]);
    order.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const heads = several ? ["head", `${title(column)}, first`, "last", "change"]
      : ["head", "verdict", "form", "regime", ...shown.map(title)];
    const cells = k => {
      if (!several) {
        return ["verdict", "status", "regime", ...shown].map(x => value(audit, k, x));
      }
      const [from, to] = [value(audits[0], before(k), column), value(audit, k, column)];
      const both = typeof from === "number" && typeof to === "number";
      return [from, to, both ? to - from : from === to ? "no" : "yes"];
    };
    const top = make("tr");
    for (const name of heads) top.append(make("th", name, {scope: "col"}));
    byId("audit-table").replaceChildren(top, ...order.slice(0, 20).map(([, k]) => {
      const line = make("tr"), cell = make("th", "", {scope: "row"});
      const button = make("button", `layer ${audit.layers[audit.row[k]]}, head ${audit.head[k]}`,
        {type: "button", class: "pick"});
      button.addEventListener("click", () => {
        pick(keyOf(audit, k));
        byId("head").scrollIntoView();
      });
      cell.append(button);
      line.append(cell, ...cells(k).map(x => make("td", number(x),
        {class: typeof x === "number" ? "number" : ""})));
      return line;
    }));
  }

  // two maps side by side where they fit, cells that a finger still hits where they do not
  function sizeCells() {
    const width = byId("audit-maps").clientWidth;
    const room = width / (several && width > 640 ? 2 : 1) - 90;
    const heads = Math.max(...audits.map(audit => new Set(audit.head).size));
    const size = Math.max(14, Math.min(36, Math.floor(room / heads) - 1));
    byId("audit-maps").style.setProperty("--cell", `${size}px`);
  }

  byId("audit-maps").replaceChildren(...audits.map(buildMap));
  sizeCells();
  addEventListener("resize", sizeCells);
  controls.addEventListener("change", () => { drawMaps(); rank(); });
  controls.addEventListener("submit", event => event.preventDefault());
  for (const name of ["eigenvalues", "singular", "rho"]) {
    byId(`head-${name}`).addEventListener("drawn", fill);
  }
  drawMaps();
  rank();
  const holder = audits.find(audit => audit.row.length);
  choose(addressed() ?? keyOf(holder, holder.concern.indexOf(0)));
  const show = () => {
    const key = addressed();
    if (key === null) return;
    choose(key);
    byId("head").scrollIntoView();
  };
  addEventListener("hashchange", show);
  byId("head-rho").addEventListener("drawn", show, {once: true});
})();
