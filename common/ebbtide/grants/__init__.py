"""Maps the page of shared memory between a serving-guard and the engine that borrows from it."""

from ebbtide.grants.folder import check_folder, locked_folder, page_path, socket_path
from ebbtide.grants.page import Page, Stepping

__all__ = ["Page", "Stepping", "check_folder", "locked_folder", "page_path", "socket_path"]
