"""The SQLite schema of a state volume. Times are nanoseconds, sizes and offsets bytes, names and values blobs."""

APPLICATION_ID = 0x76667364  # "vfsd"
FORMAT = 1
"""Raised whenever a volume written by this code can't be read by older code."""

SCHEMA = """
CREATE TABLE node (             -- one file, directory, symlink, FIFO, socket or device; 1 is the root directory
  id     INTEGER PRIMARY KEY,
  mode   INTEGER NOT NULL,      -- type bits and permission bits
  nlink  INTEGER NOT NULL,      -- 0: unlinked while open, purged at the next start
  uid    INTEGER NOT NULL,
  gid    INTEGER NOT NULL,
  rdev   INTEGER NOT NULL,      -- device number, 0 for all else
  size   INTEGER NOT NULL,
  atime  INTEGER NOT NULL,
  mtime  INTEGER NOT NULL,
  ctime  INTEGER NOT NULL,
  target BLOB                   -- of a symlink
);
CREATE TABLE dentry (           -- name -> node
  parent INTEGER NOT NULL,
  name   BLOB NOT NULL,
  node   INTEGER NOT NULL,
  PRIMARY KEY (parent, name)
) WITHOUT ROWID;
CREATE TABLE xattr (
  node  INTEGER NOT NULL,
  name  BLOB NOT NULL,
  value BLOB NOT NULL,
  PRIMARY KEY (node, name)
) WITHOUT ROWID;
CREATE TABLE extent (           -- bytes [offset, offset + length) of node are at `disk` in the data file
  node   INTEGER NOT NULL,
  offset INTEGER NOT NULL,
  length INTEGER NOT NULL,
  disk   INTEGER NOT NULL,
  PRIMARY KEY (node, offset)
) WITHOUT ROWID;
"""

PUT = """INSERT INTO node (id, mode, nlink, uid, gid, rdev, size, atime, mtime, ctime) VALUES (?,?,?,?,?,?,?,?,?,?)
ON CONFLICT (id) DO UPDATE SET mode=excluded.mode, nlink=excluded.nlink, uid=excluded.uid, gid=excluded.gid,
size=excluded.size, atime=excluded.atime, mtime=excluded.mtime, ctime=excluded.ctime"""

STORED = """n.id, n.mode, n.nlink, n.uid, n.gid, n.rdev, n.size, n.atime, n.mtime, n.ctime, n.target,
coalesce((SELECT sum(length) FROM extent WHERE node = n.id), 0) / 512"""
