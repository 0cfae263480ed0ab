"""Records of files by index, and what a module's ``feed`` makes of them.

A `Records` is a long sequence of records over many files; any of them can be read at any time, so the order of samples
is the job's business and not that of the files. Formats: TFRecord, CSV and other text, or the module's own
``custom_data_reader``. Only `elasticdl.data.feed` imports TensorFlow.
Reading happens in whatever process or thread asks; copies in other processes open files of their own. A file that can't
be read, is damaged, or is no whole file of its format is a `UserError` wherever that shows.
"""

from elasticdl.data.records import Arrays, Metadata, Records

__all__ = ["Arrays", "Metadata", "Records"]
