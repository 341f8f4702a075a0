// Draws every chart in the colors that the reader's system asks for, as wide as the column; folds
// long pages on a phone; sorts and filters tables; makes every head a place to link to.
window.locater = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const views = {}, drawn = [], plots = new Map(), factors = new Map();

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

  // panels wider or narrower by a factor, heights a little
  function grown(spec, factor) {
    if (Array.isArray(spec)) return spec.map(part => grown(part, factor));
    if (spec === null || typeof spec !== "object") return spec;
    const isPanel = spec.mark || spec.layer || spec.spec, result = {};
    for (const [key, value] of Object.entries(spec)) {
      if (["data", "datasets", "encoding", "config", "title"].includes(key)) result[key] = value;
      else if (isPanel && key === "width" && value?.step) result.width = {step: value.step * factor};
      else if (isPanel && key === "width" && typeof value === "number") result.width = value * factor;
      else if (isPanel && key === "height" && value?.step) {
        result.height = {step: value.step * Math.min(2, Math.max(1, Math.sqrt(factor)))};
      } else if (isPanel && key === "height" && typeof value === "number") {
        result.height = value * Math.min(1.4, Math.max(1, Math.sqrt(factor)));
      } else result[key] = grown(value, factor);
    }
    return result;
  }

  // how much wider the panels of a drawn chart could be: what is not panel keeps its width
  function spare(box, room) {
    const svg = box.querySelector("svg.marks"), rows = {};
    for (const path of svg.querySelectorAll("path.background")) {
      const {top, left, width} = path.getBoundingClientRect();
      if (width < 30 || path.closest(".role-legend")) continue;
      (rows[Math.round(top)] ??= {})[Math.round(left)] = width;  // lines are groups on their panel
    }
    const panels = Math.max(0, ...Object.values(rows).map(
      row => Object.values(row).reduce((sum, width) => sum + width, 0)));
    const free = room - svg.getBoundingClientRect().width;
    return panels ? Math.max(0.4, Math.min(4, 1 + free / panels)) : 1;
  }

  // titles break where the box ends; a single panel takes the width that there is
  function fitted(spec, box, factor) {
    if ((spec.$schema ?? "").includes("/vega/")) return spec;
    const room = box.clientWidth - 44, narrow = isNarrow(box);  // beside the menu
    const single = typeof spec.width === "number" && !spec.autosize;
    const shape = narrow ? stacked(spec, single ? room : room - 70) : grown(spec, factor);
    const wrap = part => {
      if (part.title && (part.mark || part.layer || part.hconcat || part.vconcat || part.concat
        || part.facet || part.spec)) part.title = titled(part.title, Math.floor(room / 7.2));
      for (const key of ["hconcat", "vconcat", "concat"]) (part[key] ?? []).forEach(wrap);
    };
    wrap(shape);
    if (single) {
      shape.width = room;
      if (typeof spec.height === "number") {
        shape.height = narrow ? spec.height + 120 : spec.height * Math.min(1.5, room / spec.width);
      }
      shape.autosize = {type: "fit", contains: "padding", resize: true};
    }
    return shape;
  }

  function embed(box, id, spec, factor) {
    return vegaEmbed(box, fitted(inked(spec), box, factor), {
      actions: {export: true, source: false, compiled: false, editor: false},
      config: theme(isNarrow(box)), renderer: "svg", ast: false, downloadFileName: id,
    });
  }

  async function draw(id, spec) {
    const box = document.getElementById(id);
    plots.set(id, spec);
    try {
      const room = box.clientWidth - 44, key = `${id} ${room}`;
      let result = await embed(box, id, spec, factors.get(key) ?? 1);
      if (!factors.has(key) && !isNarrow(box) && typeof spec.width !== "number") {
        factors.set(key, spare(box, room));
        if (Math.abs(factors.get(key) - 1) > 0.03) {
          result.finalize();
          result = await embed(box, id, spec, factors.get(key));
        }
      }
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

  // what is folded is drawn when it is opened
  async function drawAll() {
    for (const node of document.querySelectorAll("script[data-chart]")) {
      const id = node.dataset.chart, folds = node.closest("details:not([open])");
      if (folds) folds.addEventListener("toggle", drawAll, {once: true});
      else if (!plots.has(id)) {
        await draw(id, JSON.parse(node.textContent));
        await new Promise(resume => setTimeout(resume));  // let the reader scroll meanwhile
      }
    }
    document.documentElement.dataset.ready = "yes";
  }

  async function again() {
    for (const [id, spec] of plots) {
      if (document.getElementById(id).clientWidth) await draw(id, spec);
    }
    for (const listener of drawn) listener();
  }
  dark.addEventListener("change", again);
  let width = innerWidth, later = 0;
  addEventListener("resize", () => {
    clearTimeout(later);
    later = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; again(); } }, 300);
  });

  // ---- folding: a phone gets a long page as its headings
  const parts = [...document.querySelectorAll("details.part")];
  function fold() {
    if (innerWidth >= 640) return;
    const contents = document.querySelector("details.contents");
    if (contents) contents.open = false;
    if (parts.length > 8) parts.slice(1).forEach(part => { part.open = false; });
  }
  function reveal() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let node = target?.querySelector("details.part") ?? target; node; node = node.parentElement) {
      if (node.matches("details")) node.open = true;
    }
    target?.scrollIntoView();
  }
  function follow() {
    const links = new Map([...document.querySelectorAll("nav a")].map(link => [link.hash.slice(1), link]));
    const seen = new IntersectionObserver(entries => {
      for (const {isIntersecting, target} of entries) {
        if (!isIntersecting) continue;
        document.querySelector("nav a[aria-current]")?.removeAttribute("aria-current");
        links.get(target.id)?.setAttribute("aria-current", "true");
      }
    }, {rootMargin: "-10% 0px -80% 0px"});
    document.querySelectorAll("main > section").forEach(section => seen.observe(section));
  }

  // ---- tables: a click on a title sorts, words filter, every head has a link
  const written = cell => cell.textContent.trim();
  function amount(text) {
    const found = text.replace(/−/g, "-").match(/^[-+]?(\d[\d,]*)?(\.\d+)?(e[-+]?\d+)?/i)[0];
    return found === "" ? NaN : Number(found.replace(/,/g, ""));
  }

  function sortable(table) {
    const body = table.tBodies[0], titles = [...table.tHead.rows[0].cells];
    titles.forEach((title, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...title.childNodes);
      title.append(button);
      button.addEventListener("click", () => {
        const falls = title.getAttribute("aria-sort") !== "descending";
        for (const other of titles) other.removeAttribute("aria-sort");
        title.setAttribute("aria-sort", falls ? "descending" : "ascending");
        const rows = [...body.rows].sort((a, b) => {
          const [first, second] = [a, b].map(row => written(row.cells[column]));
          const dash = Number(first === "-") - Number(second === "-");
          if (dash) return dash;  // no number stands last
          const gap = amount(first) - amount(second);
          const order = Number.isNaN(gap) ? first.localeCompare(second) : gap;
          return falls ? -order : order;
        });
        body.append(...rows);
      });
    });
  }

  function filters(table) {
    const line = document.createElement("div"), rows = [...table.tBodies[0].rows];
    line.className = "filters";
    const labelled = (words, control) => {
      const label = document.createElement("label");
      label.append(words + " ", control);
      line.append(label);
      return control;
    };
    const search = labelled("show rows with", Object.assign(document.createElement("input"), {type: "search"}));
    const choices = [...table.tHead.rows[0].cells].flatMap((title, column) => {
      if (!("choice" in title.dataset)) return [];
      const select = document.createElement("select");
      const words = [...new Set(rows.map(row => written(row.cells[column])))].sort();
      select.append(...["all", ...words].map(word => new Option(word)));
      return [[column, labelled(written(title), select)]];
    });
    const count = document.createElement("output");
    line.append(count);
    line.addEventListener("input", () => {
      const words = search.value.toLowerCase();
      let shown = 0;
      for (const row of rows) {
        row.hidden = !row.textContent.toLowerCase().includes(words) || choices.some(
          ([column, select]) => select.value !== "all" && written(row.cells[column]) !== select.value);
        shown += !row.hidden;
      }
      count.textContent = `${shown} of ${rows.length}`;
    });
    (table.closest(".table") ?? table).before(line);
  }

  // a row of a table with the columns layer and head is #layer-4-head-7
  function linked(table) {
    const names = [...table.tHead.rows[0].cells].map(written);
    const [layer, head] = [names.indexOf("layer"), names.indexOf("head")];
    if (layer < 0 || head < 0) return;
    for (const row of table.tBodies[0].rows) {
      const id = anchor(written(row.cells[layer]), written(row.cells[head]));
      if (document.getElementById(id)) continue;
      row.id = id;
      const link = document.createElement("a");
      link.href = "#" + id;
      link.append(...row.cells[head].childNodes);
      row.cells[head].append(link);
    }
  }
  const anchor = (layer, head) => `layer-${String(layer).replace(/[^\p{L}\d]+/gu, "-")}-head-${head}`;

  // a hint above what is wider than the screen
  function hints() {
    for (const box of document.querySelectorAll(".table")) {
      let hint = box.previousElementSibling;
      if (!hint?.matches(".hint")) {
        hint = Object.assign(document.createElement("p"), {className: "hint", textContent: "wider than the screen: scroll it sideways →"});
        box.before(hint);
      }
      const isWide = box.scrollWidth > box.clientWidth + 1;
      hint.classList.toggle("shown", isWide);
      if (isWide) box.tabIndex = 0;  // arrow keys scroll it
    }
  }

  function start() {
    for (const table of document.querySelectorAll("table")) {
      if (!table.tHead?.rows.length || !table.tBodies.length || table.matches(".map")) continue;
      linked(table);
      if (table.tBodies[0].rows.length > 12) filters(table);
      if (table.tBodies[0].rows.length > 2) sortable(table);
    }
    fold();
    reveal();
    hints();
    follow();
    addEventListener("hashchange", reveal);
    addEventListener("resize", hints);
    document.addEventListener("toggle", hints, {capture: true});
    addEventListener("beforeprint", () => parts.forEach(part => { part.open = true; }));
    return drawAll();
  }

  const data = id => JSON.parse(document.getElementById(id).textContent);
  return {views, draw, start, data, anchor, isDark: () => dark.matches, onTheme: f => drawn.push(f)};
})();
