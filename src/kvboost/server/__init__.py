"""An OpenAI-compatible server over one engine. Needs the extra `server`."""
