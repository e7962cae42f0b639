"""Sites of an outer loop that are runs of their own, and the hub through which they meet.

Read in this order: `ledger` (rounds, and who counts), `hub` (serves it), `link` (a site's
connections), `programs` (what is compiled), `site` (the rounds beside the steps). Decision 0039.
"""
