"""What an environment gives to those who import it, such as trainers and viewers: tools, observations, texts, client.

Nothing here imports server code (an import rule), so that an environment's published half does not either.
"""
