/* Lets a reader hide methods: their rows and columns in tables, and what belongs to them in figures.
   The page says how many are shown; the list can be searched, and "only" shows one method beside the reference. */
(() => {
  "use strict";
  const box = document.querySelector(".methods");
  if (!box) return;
  const names = JSON.parse(box.dataset.methods), reference = box.dataset.reference;
  const shown = new Set(names), marks = new Map(names.map((name) => [name, []]));
  const add = (name, element) => marks.get(name)?.push(element);

  for (const element of document.querySelectorAll('svg [id^="method:"]')) add(element.id.slice(7), element);
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
    const columns = heads.map((head) => names.includes(head) ? head : null);
    const across = columns.filter(Boolean).length > 1;
    for (const row of table.rows) {
      if (across) columns.forEach((name, k) => name && add(name, row.cells[k]));
      else if (row.parentElement === table.tBodies[0]) add(row.cells[0].textContent.trim(), row);
    }
  }

  const list = box.querySelector("ul"), count = box.querySelector("output"), search = box.querySelector("input[type=search]");
  const boxes = new Map();
  for (const name of names) {
    const item = document.createElement("li"), label = document.createElement("label"), tick = document.createElement("input");
    tick.type = "checkbox";
    tick.checked = true;
    tick.addEventListener("change", () => { tick.checked ? shown.add(name) : shown.delete(name); apply(); });
    label.append(tick, ` ${name}`);
    const only = document.createElement("button");
    only.type = "button";
    only.textContent = "only";
    only.title = name === reference ? "hide all others" : `hide all others but ${reference}`;
    only.addEventListener("click", () => { shown.clear(); shown.add(name); shown.add(reference); apply(); });
    item.append(label, only);
    list.append(item);
    boxes.set(name, { item, tick });
  }
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    for (const [name, { item }] of boxes) item.hidden = !name.toLowerCase().includes(wanted);
  });
  box.querySelector("button.all").addEventListener("click", () => { names.forEach((name) => shown.add(name)); apply(); });

  function apply() {
    for (const name of names) {
      boxes.get(name).tick.checked = shown.has(name);
      for (const element of marks.get(name)) element.style.display = shown.has(name) ? "" : "none";
    }
    count.textContent = `${shown.size} of ${names.length} methods shown`;
  }
  box.hidden = false;
  apply();
})();
