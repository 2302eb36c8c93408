"""The survey in parts; `provision.resources.script` makes them one text, which is what travels to hosts. `whole` is where it starts."""
