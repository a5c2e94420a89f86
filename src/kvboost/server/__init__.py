"""An OpenAI-compatible server over one engine. Needs the extra `server`.

`app.create_app` makes the application, `runner` runs it, `worker` runs the model.
"""
