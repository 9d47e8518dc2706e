"""Pages of results, as HTML and on a terminal: the kit (words, svg, answer), then the audit's."""
