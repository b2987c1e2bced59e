"""The web page at /: a chat, and a view of what the engine does. The files are static; `static/main.js` is their start."""
