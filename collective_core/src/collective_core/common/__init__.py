"""Parts that the interfaces of all frameworks share. Imports none of them."""
