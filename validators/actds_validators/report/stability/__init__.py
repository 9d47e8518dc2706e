"""The report of stability: words, the chart, and the two pages that show them."""
