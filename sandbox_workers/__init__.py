"""Where tools will run confined. Nothing is here yet: until then a tool says ``runs="host"``."""
