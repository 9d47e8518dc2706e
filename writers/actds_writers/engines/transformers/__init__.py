"""Everything that touches the transformers library: engine, batches, worker, witness."""
