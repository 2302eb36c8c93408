"""What commands do, a use case per module."""
