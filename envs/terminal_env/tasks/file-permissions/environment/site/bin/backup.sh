#!/bin/bash
tar -cf - ../data
