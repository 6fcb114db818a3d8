"""Guard: nothing that another user may have written can run code or get a secret unnoticed.

``SECURITY.md`` has the threat model: who may write what, what is refused, and what is not protected.

| file | what it checks |
| --- | --- |
| ``config_files`` | each composition by Hydra: YAML files that are not those of distexp |
| ``command_line`` | what the user has typed, and so trusts |
| ``sweep_files`` | the directory and the stored command of a sweep, if this user has not written them |
| ``secrets`` | configurations and command lines: no secret, because both are written to files |

Checkpoints are read by ``system/restricted_loading``, which refuses pickles that are not data.
"""
