"""Reports the chosen plan and the reasons.

Read in this order: `host` (what lies in the memory of hosts), `tables` (plans and reasons, in the
terminal), `sites` (what an outer loop is worth), `page` (collects the data of one HTML file),
`page.html` and `page.js` (draw it in the browser).
"""
