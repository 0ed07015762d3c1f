"""Messages and records: conversion by field name, and the columns of the append stream."""
