"""Feed a trainer: batches of rows, in an order, out of one dataset or a mixture."""
