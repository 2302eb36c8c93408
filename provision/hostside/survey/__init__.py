"""The survey in parts; `provision.base.resources.script` makes them one text, which is what travels to hosts. `whole` is where it starts."""
