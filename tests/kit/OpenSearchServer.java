import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import org.opensearch.common.logging.LogConfigurator;
import org.opensearch.common.settings.Settings;
import org.opensearch.env.Environment;
import org.opensearch.node.InternalSettingsPreparer;
import org.opensearch.node.Node;
import org.opensearch.plugins.Plugin;

/** One node of OpenSearch on loopback, from jars: folder, port for HTTP, port for other nodes. */
public class OpenSearchServer extends Node {
  private static final List<String> PLUGINS =
      List.of(
          "org.opensearch.transport.Netty4Plugin",
          "org.opensearch.analysis.common.CommonAnalysisPlugin");

  OpenSearchServer(Environment environment, Collection<Class<? extends Plugin>> plugins) {
    super(environment, plugins, false);
  }

  public static void main(String[] given) throws Exception {
    String home = given[0];
    System.setProperty("opensearch.path.home", home);
    for (String name : List.of("config", "modules", "plugins")) {
      Files.createDirectories(Path.of(home, name));
    }
    Settings settings =
        Settings.builder()
            .put("path.home", home)
            .put("cluster.name", "everstate-tests")
            .put("node.name", "one")
            .put("network.host", "127.0.0.1")
            .put("http.port", given[1])
            .put("transport.port", given[2])
            .put("discovery.type", "single-node")
            .put("transport.type", "netty4")
            .put("http.type", "netty4")
            .put("node.processors", 2)
            .put("cluster.routing.allocation.disk.threshold_enabled", false)
            .build();
    Environment environment =
        InternalSettingsPreparer.prepareEnvironment(
            settings, Map.of(), Path.of(home, "config"), () -> "one");
    LogConfigurator.setNodeName("one");
    List<Class<? extends Plugin>> plugins = new ArrayList<>();
    for (String name : PLUGINS) {
      plugins.add(Class.forName(name).asSubclass(Plugin.class));
    }
    OpenSearchServer node = new OpenSearchServer(environment, plugins);
    node.start();
    Thread.currentThread().join();
  }
}
