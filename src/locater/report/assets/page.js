// Draws every chart of the page, in the colors that the reader's system asks for.
window.locater = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const views = {}, drawn = [], plots = new Map();

  function theme() {
    const [ink, soft, grid] = dark.matches ? ["#e8e8e6", "#8a8f96", "#33373c"]
      : ["#1b1b1b", "#888888", "#dddddd"];
    return {
      background: "transparent", font: "system-ui, sans-serif",
      title: {color: ink, subtitleColor: ink}, rule: {color: ink}, text: {color: ink},
      style: {"guide-label": {fill: ink}, "guide-title": {fill: ink},
        "group-title": {fill: ink}, cell: {stroke: soft}},
      legend: {labelFontSize: 12, titleFontSize: 12},
      axis: {labelFontSize: 11, titleFontSize: 12, domainColor: soft, tickColor: soft, gridColor: grid}, view: {stroke: soft},
    };
  }

  // the near-black of the specifications is ink: it follows the paper
  function inked(spec) {
    const text = JSON.stringify(spec);
    return JSON.parse(dark.matches ? text.replace(/"#222(222)?"/g, '"#e8e8e6"') : text);
  }

  // a single panel takes the width that there is; a grid of panels scrolls inside its box
  function fitted(spec, box) {
    if (typeof spec.width === "number" && !spec.autosize) {
      spec.width = Math.min(spec.width + 80, box.clientWidth - 44);  // beside the menu
      if (typeof spec.height === "number") spec.height += 60;
      spec.autosize = {type: "fit", contains: "padding"};
    }
    return spec;
  }

  async function draw(id, spec) {
    const box = document.getElementById(id);
    plots.set(id, spec);
    try {
      const result = await vegaEmbed(box, fitted(inked(spec), box), {
        actions: {export: true, source: false, compiled: false, editor: false},
        config: theme(), renderer: "svg", ast: false, downloadFileName: id,
      });
      views[id]?.finalize();
      views[id] = result.view;
      box.dataset.drawn = "yes";
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;  // arrow keys scroll it
      box.dispatchEvent(new CustomEvent("drawn"));
    } catch (error) {
      box.textContent = "This figure could not be drawn: " + error;
      throw error;
    }
    return views[id];
  }

  async function drawAll() {
    for (const node of document.querySelectorAll("script[data-chart]")) {
      await draw(node.dataset.chart, JSON.parse(node.textContent));
      await new Promise(resume => setTimeout(resume));  // let the reader scroll meanwhile
    }
    document.documentElement.dataset.ready = "yes";
  }

  dark.addEventListener("change", async () => {
    for (const [id, spec] of plots) await draw(id, spec);
    for (const listener of drawn) listener();
  });

  const data = id => JSON.parse(document.getElementById(id).textContent);
  return {views, draw, drawAll, data, isDark: () => dark.matches, onTheme: f => drawn.push(f)};
})();
