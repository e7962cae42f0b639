"""Says what was chosen and why: `tables` for the terminal, `page` for the browser."""
