"""What a request keeps on the device between steps."""
