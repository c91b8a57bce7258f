"""What a model loses without some of its stages."""
