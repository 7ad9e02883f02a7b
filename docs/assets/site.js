// Browsers load no search index into a page that was opened as a file, so the search box is shown only by a server.
if (location.protocol === "file:") document.documentElement.classList.add("from-file");
