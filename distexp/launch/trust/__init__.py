"""What distexp trusts: nothing that another user may have written can run code or get a secret unnoticed.

| file | what it checks |
| --- | --- |
| ``config_loader`` | each composition by Hydra: calls the checks of YAML files and of secrets |
| ``packages`` | ``trusted_packages``: only the command line and the environment give trust |
| ``hydra_values`` | YAML files: the ``hydra:`` section, which names classes |
| ``shell_values`` | YAML files: shell lines, environment variables and servers |
| ``secret_checks`` | configurations and command lines: no secret, because both are written to files |
| ``stored_command`` | ``command.json`` of a sweep that is resumed |
| ``foreign_sweep`` | the directory of a sweep of another user |
| ``own_files`` | which stored files distexp has written for this user |

The others read for them: ``typed_overrides`` a command line, ``chosen_files`` the files of a configuration.
"""
