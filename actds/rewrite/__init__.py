"""The same rows in other bytes, or in another order: recompress and shuffle."""
