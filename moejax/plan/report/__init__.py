"""Reports what was chosen and why: `tables` in the terminal, `page` in the browser."""
