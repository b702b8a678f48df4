import java.io.InputStream;
import java.io.OutputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.HexFormat;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.hdfs.HdfsConfiguration;
import org.apache.hadoop.hdfs.MiniDFSCluster;

/**
 * One NameNode and one DataNode in this process, or a program that reads and writes files there.
 *
 *   cluster FOLDER BUFFER      prints the address of the NameNode, and ends with its input; BUFFER bytes go to the socket at a time
 *   write ADDRESS FILE NAME ROUNDS
 *   read ADDRESS NAME ROUNDS   prints seconds and bytes of each round; of the first one also the MD5, which is not measured
 */
public class Cluster {
    public static void main(String[] arguments) throws Exception {
        switch (arguments[0]) {
            case "cluster" -> cluster(arguments[1], arguments[2]);
            case "write" -> write(arguments);
            case "read" -> read(arguments);
            default -> throw new IllegalArgumentException(arguments[0]);
        }
    }

    private static Configuration settings() {
        var settings = new HdfsConfiguration();
        settings.setBoolean("dfs.client.read.shortcircuit", false);
        settings.setInt("dfs.replication", 1);
        settings.setLong("dfs.blocksize", 128L << 20);
        return settings;
    }

    private static void cluster(String folder, String buffer) throws Exception {
        var settings = settings();
        settings.set("io.file.buffer.size", buffer);
        // Blocks stay in the page cache.
        settings.setBoolean("dfs.datanode.drop.cache.behind.reads", false);
        settings.setLong("dfs.datanode.readahead.bytes", 0);
        try (var cluster = new MiniDFSCluster.Builder(settings, Path.of(folder).toFile()).numDataNodes(1).build()) {
            cluster.waitActive();
            System.out.println(cluster.getURI());
            System.out.flush();
            while (System.in.read() >= 0) {}
        }
    }

    private static FileSystem connect(String address) throws Exception {
        return FileSystem.get(java.net.URI.create(address), settings());
    }

    private static void write(String[] arguments) throws Exception {
        byte[] content = Files.readAllBytes(Path.of(arguments[2]));
        try (var files = connect(arguments[1])) {
            for (int round = 0; round < Integer.parseInt(arguments[4]); round++) {
                long began = System.nanoTime();
                try (OutputStream out = files.create(new org.apache.hadoop.fs.Path(arguments[3]), true)) {
                    out.write(content);
                }
                print(began, content.length, "");
            }
        }
    }

    private static void read(String[] arguments) throws Exception {
        try (var files = connect(arguments[1])) {
            byte[] room = new byte[1 << 20];
            for (int round = 0; round < Integer.parseInt(arguments[3]); round++) {
                var digest = round == 0 ? MessageDigest.getInstance("MD5") : null;
                long began = System.nanoTime(), bytes = 0;
                try (InputStream in = files.open(new org.apache.hadoop.fs.Path(arguments[2]))) {
                    for (int got; (got = in.read(room)) > 0; bytes += got)
                        if (digest != null) digest.update(room, 0, got);
                }
                print(began, bytes, digest == null ? "" : " " + HexFormat.of().formatHex(digest.digest()));
            }
        }
    }

    private static void print(long began, long bytes, String more) {
        System.out.printf("%.6f %d%s%n", (System.nanoTime() - began) / 1e9, bytes, more);
        System.out.flush();
    }
}
