"""The format on disk: documents, paths, tables, codec, arrays, shards."""
