// Draws every chart of the page, in the colors that the reader's system asks for.
window.locater = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const views = {}, drawn = [], plots = new Map();

  function theme(narrow) {
    const [ink, soft, grid] = dark.matches ? ["#e8e8e6", "#8a8f96", "#33373c"]
      : ["#1b1b1b", "#888888", "#dddddd"];
    return {
      background: "transparent", font: "system-ui, sans-serif",
      title: {color: ink, subtitleColor: ink, anchor: "start"}, rule: {color: ink}, text: {color: ink},
      style: {"guide-label": {fill: ink}, "guide-title": {fill: ink},
        "group-title": {fill: ink}, cell: {stroke: soft}},
      legend: {labelFontSize: 12, titleFontSize: 12, ...(narrow ? {orient: "bottom"} : {})},
      axis: {labelFontSize: 11, titleFontSize: 12, domainColor: soft, tickColor: soft, gridColor: grid}, view: {stroke: soft},
    };
  }

  const isNarrow = box => box.clientWidth < 600;

  // the near-black of the specifications is ink: it follows the paper; so does the dark blue
  function inked(spec) {
    const text = JSON.stringify(spec);
    return JSON.parse(!dark.matches ? text
      : text.replace(/"#222(222)?"/g, '"#e8e8e6"').replace(/"#0072B2"/g, '"#4aa8e8"'));
  }

  // lines of at most so many letters, broken at spaces
  function wrapped(text, letters) {
    const lines = [""];
    for (const word of [].concat(text).join("\n").split(/ |(?=\n)/)) {
      const fresh = word.startsWith("\n") || lines[0] === "";
      const last = lines[lines.length - 1];
      if (lines[0] !== "" && (fresh || last.length + word.length >= letters)) lines.push(word.trim());
      else lines[lines.length - 1] = last ? last + " " + word : word.trim();
    }
    return lines;
  }

  function titled(title, letters) {
    if (typeof title === "string" || Array.isArray(title)) return wrapped(title, letters);
    const small = Math.round(letters * 1.1), copy = {...title};
    if (copy.text) copy.text = wrapped(copy.text, letters);
    if (copy.subtitle) copy.subtitle = wrapped(copy.subtitle, small);
    return copy;
  }

  // on a narrow screen panels stand below each other, no wider than it is, legends below them
  function stacked(spec, room) {
    if (Array.isArray(spec)) return spec.map(part => stacked(part, room));
    if (spec === null || typeof spec !== "object") return spec;
    const result = {};
    for (const [key, value] of Object.entries(spec)) {
      if (key === "data" || key === "datasets") result[key] = value;
      else if (key === "hconcat") result.vconcat = stacked(value, room);
      else if (key === "columns") result.columns = 1;
      else if (key === "width" && typeof value === "number") result.width = Math.min(value, room);
      else if (key === "legend" && value) {
        result.legend = {...value, orient: "bottom", direction: "vertical", columns: 1,
          labelLimit: room - 40};
      } else if (key === "facet" && value.column && !value.row) {
        result.facet = {row: {...value.column, header: {...value.column.header,
          labelAngle: 0, labelAlign: "left", labelOrient: "top"}}};
      } else result[key] = stacked(value, room);
    }
    return result;
  }

  // titles break where the box ends; a single panel takes the width that there is
  function fitted(spec, box) {
    if ((spec.$schema ?? "").includes("/vega/")) return spec;
    const room = box.clientWidth - 44, narrow = isNarrow(box);  // beside the menu
    const single = typeof spec.width === "number" && !spec.autosize;
    const shape = narrow ? stacked(spec, single ? room : room - 70) : spec;
    const wrap = part => {
      if (part.title && (part.mark || part.layer || part.hconcat || part.vconcat || part.concat
        || part.facet || part.spec)) part.title = titled(part.title, Math.floor(room / 7.2));
      for (const key of ["hconcat", "vconcat", "concat"]) (part[key] ?? []).forEach(wrap);
    };
    wrap(shape);
    if (single) {
      shape.width = Math.min(spec.width + 80, room);
      if (typeof shape.height === "number") shape.height += narrow ? 120 : 60;
      shape.autosize = {type: "fit", contains: "padding", resize: true};
    }
    return shape;
  }

  async function draw(id, spec) {
    const box = document.getElementById(id);
    plots.set(id, spec);
    try {
      const result = await vegaEmbed(box, fitted(inked(spec), box), {
        actions: {export: true, source: false, compiled: false, editor: false},
        config: theme(isNarrow(box)), renderer: "svg", ast: false, downloadFileName: id,
      });
      views[id]?.finalize();
      views[id] = result.view;
      box.dataset.drawn = "yes";
      box.querySelector("summary")?.setAttribute("aria-label", "Save this figure");
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

  async function again() {
    for (const [id, spec] of plots) await draw(id, spec);
    for (const listener of drawn) listener();
  }
  dark.addEventListener("change", again);
  let width = innerWidth, later = 0;
  addEventListener("resize", () => {
    clearTimeout(later);
    later = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; again(); } }, 300);
  });

  const data = id => JSON.parse(document.getElementById(id).textContent);
  return {views, draw, drawAll, data, isDark: () => dark.matches, onTheme: f => drawn.push(f)};
})();
