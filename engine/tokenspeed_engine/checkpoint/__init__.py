"""Reading model folders in Hugging Face's layout. Importing this package imports no torch; `reader` and `load` do."""
