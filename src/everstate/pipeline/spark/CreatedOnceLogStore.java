package everstate;

import io.delta.storage.S3SingleDriverLogStore;
import java.io.ByteArrayOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Iterator;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

/**
 * Commits of Delta tables on S3: the store itself creates a commit's file only if it is not there.
 *
 * Delta's own class for S3 looks for the file and then writes it, so that a second process could
 * replace a commit. Here the second one is refused, as on a disk. A commit whose answer was lost is
 * there already: it is recognised by its content, which has an id of its own.
 */
public class CreatedOnceLogStore extends S3SingleDriverLogStore {
    public CreatedOnceLogStore(Configuration conf) {
        super(conf);
    }

    // Janino, which compiles this, knows no type arguments.
    public void write(Path path, Iterator actions, Boolean overwrite, Configuration conf)
            throws IOException {
        if (overwrite.booleanValue()) {
            super.write(path, actions, overwrite, conf);
            return;
        }
        ByteArrayOutputStream lines = new ByteArrayOutputStream();
        while (actions.hasNext()) {
            lines.write(((String) actions.next() + "\n").getBytes(StandardCharsets.UTF_8));
        }
        byte[] commit = lines.toByteArray();
        FileSystem store = path.getFileSystem(conf);
        FSDataOutputStreamBuilder created = store.createFile(path).create();
        created.must("fs.option.create.conditional.overwrite", true);
        try {
            FSDataOutputStream file = (FSDataOutputStream) created.build();
            file.write(commit);
            file.close();
        } catch (IOException failure) {
            if (!store.exists(path)) {
                throw failure;
            }
            if (!holds(store, path, commit)) {
                throw new java.nio.file.FileAlreadyExistsException(path.toString());
            }
        }
    }

    private static boolean holds(FileSystem store, Path path, byte[] commit) throws IOException {
        byte[] found = new byte[commit.length];
        FSDataInputStream file = store.open(path);
        try {
            file.readFully(found);
            return file.read() < 0 && Arrays.equals(found, commit);
        } catch (EOFException shorter) {
            return false;
        } finally {
            file.close();
        }
    }
}
