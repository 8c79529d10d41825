"""The HTTP server: OpenAI's API and a page, over one engine on one thread."""
