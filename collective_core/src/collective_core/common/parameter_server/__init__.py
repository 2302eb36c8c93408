"""Parameter servers without a framework: who is one, messages, layout, clocks, and what is asked and answered."""
