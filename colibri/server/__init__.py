"""The HTTP server: OpenAI's API, Anthropic's and a page, over one engine on one thread."""
