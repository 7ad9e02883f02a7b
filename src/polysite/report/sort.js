/* Sorts every <table class="sortable"> by the column whose header is pressed; rows of class total or label stay last. */
(() => {
  "use strict";
  const MISSING = /^(|[-–—]|n\/a|nan)$/i;
  const NUMBER = /^[<>≤≥±★*\s]*([-−+]?\d+(?:[\s,]\d{3})*(?:\.\d+)?(?:e[-−+]?\d+)?)\s*([kMGT]?B\b)?/;
  const BYTES = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };

  function read(cell) {
    const text = (cell?.dataset.value ?? cell?.textContent ?? "").trim();
    const found = text.match(NUMBER);
    const number = found ? parseFloat(found[1].replace("−", "-").replace(/[\s,]/g, "")) * (BYTES[found[2]] ?? 1) : NaN;
    return { text, number, missing: MISSING.test(text) };
  }

  function sort(body, column, sign) {
    const last = (row) => row.classList.contains("total") || row.classList.contains("label");
    const rows = [...body.rows].filter((row) => !last(row)).map((row) => ({ row, ...read(row.cells[column]) }));
    const numbers = rows.every((r) => r.missing || !isNaN(r.number));
    rows.sort((a, b) => a.missing - b.missing
      || sign * ((numbers && a.number - b.number) || a.text.localeCompare(b.text, undefined, { numeric: true })));
    body.append(...rows.map((r) => r.row), ...[...body.rows].filter(last));
  }

  function press(table, header, column) {
    const sign = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of table.tHead.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    for (const body of table.tBodies) sort(body, column, sign);
  }

  for (const table of document.querySelectorAll("table.sortable:not([data-sorts])")) {
    if (!table.tHead?.rows.length) continue;
    table.dataset.sorts = "";
    let column = 0;
    for (const header of [...table.tHead.rows].at(-1).cells) {
      const at = column;
      column += header.colSpan;
      if (header.colSpan > 1 || !header.textContent.trim()) continue;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      button.addEventListener("click", () => press(table, header, at));
      header.append(button);
    }
  }

  if (!document.querySelector("style[data-sorts]")) {
    const style = document.createElement("style");
    style.dataset.sorts = "";
    style.textContent = `
      .sortable th button { font: inherit; color: inherit; text-align: inherit; background: none; border: 0; margin: 0; padding: .2rem 0; cursor: pointer; }
      .sortable th button:focus-visible { outline: 3px solid #0072b2; outline-offset: 2px; }
      .sortable th button::after { content: "\\00a0↕"; opacity: .4; }
      .sortable th[aria-sort=ascending] button::after { content: "\\00a0↑"; opacity: 1; }
      .sortable th[aria-sort=descending] button::after { content: "\\00a0↓"; opacity: 1; }
      @media (pointer: coarse) { .sortable th button { min-height: 2.75rem; } }
      @media print { .sortable th button::after { display: none; } }`;
    document.head.append(style);
  }
})();
