#!/bin/bash
set -eu
echo deploying "$1"
