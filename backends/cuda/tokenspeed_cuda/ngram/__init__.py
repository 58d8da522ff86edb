"""n-gram embeddings."""
