// A click on a column's title sorts the table by it: numbers by size, words by letters, again the other way.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((title, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.append(...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      const falls = title.getAttribute("aria-sort") !== "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      title.setAttribute("aria-sort", falls ? "descending" : "ascending");
      const key = row => row.cells[column].textContent.trim();
      const isNumber = text => text !== "" && !Number.isNaN(Number(text));
      const rows = [...body.rows].sort((a, b) => {
        const [first, second] = [key(a), key(b)], dash = Number(first === "-") - Number(second === "-");
        if (dash) return dash;  // no number stands last
        const gap = isNumber(first) && isNumber(second) ? Number(first) - Number(second)
          : first.localeCompare(second);
        return falls ? -gap : gap;
      });
      body.append(...rows);
    });
  });
}
