"""Ready-to-run images from the same plan as the hosts: rendered, built through the container engine, verified by running them."""
