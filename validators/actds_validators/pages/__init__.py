"""The report of an audit: one HTML page and a terminal page; knows the result, and no dataset."""
