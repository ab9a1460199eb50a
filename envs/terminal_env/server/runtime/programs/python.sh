#!/bin/sh
# python3 of test.sh: with our sitecustomize also where the script sets PYTHONPATH itself.
case ":${PYTHONPATH:-}:" in
    *:/site:*) ;;
    *) PYTHONPATH="/site${PYTHONPATH:+:$PYTHONPATH}"; export PYTHONPATH ;;
esac
exec /usr/bin/python3 "$@"
