"""What checks pages, and writes them."""
