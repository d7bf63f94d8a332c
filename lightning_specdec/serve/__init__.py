"""An OpenAI-compatible server over one session; needs the extra `serve`."""
