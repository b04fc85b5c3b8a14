"""Storage, clocks, commits and wake-ups: what the core decides is done here."""
