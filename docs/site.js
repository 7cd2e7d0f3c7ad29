// What the theme adds to a page while it loads: a code's bar is no landmark, and a table that scrolls
// sideways is reached by Tab.
const mend = () => {
  for (const bar of document.querySelectorAll(".md-code__nav")) bar.role = "none";
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) {
    if (table.scrollWidth > table.clientWidth) table.tabIndex = 0;
  }
};
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
