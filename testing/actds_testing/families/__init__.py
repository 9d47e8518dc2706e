"""Model families: tiny models of each, harvested and held against transformers."""
