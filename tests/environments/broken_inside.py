import a_package_nobody_has  # noqa: F401
