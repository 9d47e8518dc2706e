"""The dataset as a whole: its ledger, what is committed, what is read, and the account of it."""
