"""Guard: nothing that another user may have written can run code or get a secret unnoticed.

``SECURITY.md`` has the threat model. ``config_files`` checks each composition by Hydra, and the directory and the
stored command of a sweep from another user; ``command_line`` what the user typed, and secrets in it. Checkpoints are
read by ``system/restricted_loading``, which refuses pickles that are not data.
"""
